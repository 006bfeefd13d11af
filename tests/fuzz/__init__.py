"""Calls of the public functions with random sizes and options, on 1 to 4 ranks, against unsharded results in fp64."""
