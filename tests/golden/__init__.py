"""Banks that were made once, and that every later version must open and read to the same end."""
