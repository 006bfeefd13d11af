"""The first steps of a script, run twice, stock and with the launcher's changes, and compared.

`step_recorder` records the steps of a script in its process; `two_runs` starts both runs; `side_by_side` compares and
draws their steps.
"""
