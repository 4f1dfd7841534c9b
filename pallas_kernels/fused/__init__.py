"""What stands between products and attention: norms, rotary embedding, cache writes, gates."""
