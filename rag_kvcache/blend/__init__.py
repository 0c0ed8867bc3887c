"""Which tokens of moved documents to compute again: scores, and the choice by them."""
