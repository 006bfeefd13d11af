"""Ray actors, one a rank: calls, heartbeats, and reports on ranks that are lost, stopped or hung."""
