"""Ranks and what they exchange: groups, collectives, vocabulary shards."""

from megatron_ext.distributed.groups import VocabShard

__all__ = ["VocabShard"]
