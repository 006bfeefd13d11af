"""The order in which the stages of a pipeline compute and send, where all stages share embedding and lm head.

`passes` names computations and messages, and says which wait for which. `pass_order` finds each stage's passes by
simulating the step, and `stage_programs` one order for all passes and messages of the pipeline, and each stage's part.
"""
