"""Arguments of the script beside this file, found by `sys.path[0]`; parsed at import, as pretraining scripts do."""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
parser.add_argument("--sequence-parallel", action="store_true")
parser.add_argument("--transformer-impl", choices=["local", "transformer_engine"], default="transformer_engine")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--cpu", help="the launcher has one of this name; after the script it is the script's")
parser.add_argument("--report", required=True)
arguments = parser.parse_args()

assert os.path.samefile(sys.path[0], os.path.dirname(__file__)), sys.path
assert os.path.basename(sys.argv[0]) == "pretrain.py", sys.argv
