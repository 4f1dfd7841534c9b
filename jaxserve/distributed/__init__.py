"""The processes of one engine and what passes between them."""
