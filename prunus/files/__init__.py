"""Reading and writing files: each complete when it appears, and read without executing what is in it."""
