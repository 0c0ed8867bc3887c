"""From a prompt to segments: rendering, locating documents, cutting tokens."""
