"""Communicators as queues: launches that run in order over connections between all ranks, and what goes wrong."""
