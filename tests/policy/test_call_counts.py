"""The calls of a training step: of the policy's own functions, and of all of the package's. They only go down."""

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss
from tests.head.test_call_counts import Counts, assert_within, counted
from tests.policy.problems import tiny_batch, tiny_config
from tests.ranks import ranks


@ranks(1)
def test_calls_of_two_micro_batches_stay_within_bounds():
    config = tiny_config(train_global_batch_size=4, train_micro_batch_size=2)
    worker, data = DTensorPolicyWorker(config, init_reference_model=False), tiny_batch(4)
    worker.train(data, NLLLoss())  # what is found out once
    _, found = counted(lambda: worker.train(data, NLLLoss()))
    assert_within(found, Counts(calls=635, files=45, moves=391, first_product=151))
    worker.shutdown()
