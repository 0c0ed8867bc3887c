"""Benchmarks that anyone can rerun: ``python -m rag_kvcache.bench``."""
