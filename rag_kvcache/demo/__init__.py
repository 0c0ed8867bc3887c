"""The demo: a shop's support desk, asked the same questions without and with reuse.

Run it with ``python -m rag_kvcache.demo`` (or ``make demo`` in a checkout).
"""
