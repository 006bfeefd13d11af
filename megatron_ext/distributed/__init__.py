"""Ranks and what they exchange: groups, collectives, vocabulary shards."""

from megatron_ext.distributed.vocab import VocabShard

__all__ = ["VocabShard"]
