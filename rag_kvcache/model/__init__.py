"""The version layer over transformers: nothing outside this package imports it."""
