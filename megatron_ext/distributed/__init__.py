"""Process groups, collectives and vocabulary shards."""

from megatron_ext.distributed.groups import VocabShard

__all__ = ["VocabShard"]
