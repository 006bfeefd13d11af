"""The first steps of a script twice, stock and with what the launcher changes, and where the two differ.

`step_recorder` writes down the steps of a script in its process; `two_runs` starts both runs; `side_by_side` compares
and draws their steps.
"""
