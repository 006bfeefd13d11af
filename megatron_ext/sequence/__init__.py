"""Sequences: next tokens, packing, the split over context-parallel ranks, attention."""
