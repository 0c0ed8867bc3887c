"""Choosing which tokens of moved documents to compute anew. One method is one file."""

from rag_kvcache.blend.composed import Composed, MovedRun, Repair
from rag_kvcache.blend.deviation import Deviation
from rag_kvcache.blend.first_k import FirstK
from rag_kvcache.blend.nothing import Nothing
from rag_kvcache.blend.profile import Profile
from rag_kvcache.blend.two_pass import TwoPass

__all__ = ["Composed", "Deviation", "FirstK", "MovedRun", "Nothing", "Profile", "Repair", "TwoPass"]
