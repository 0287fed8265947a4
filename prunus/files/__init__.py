"""Reading and writing files: whole or not at all, and without executing what is in them."""
