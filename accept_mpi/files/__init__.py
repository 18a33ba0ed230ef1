"""Files that may be damaged, huge or not files at all, read and written safely."""
