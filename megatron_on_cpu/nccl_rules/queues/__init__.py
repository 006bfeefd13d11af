"""Communicators as queues: launches that run in order over connections between all ranks, and reports of faults."""
