"""Know the memory before it is used."""
