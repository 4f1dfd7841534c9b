"""Who may ask, and how much: keys, sizes, and the bound of the queue."""
