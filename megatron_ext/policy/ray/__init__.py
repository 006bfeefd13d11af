"""Ray actors, one a rank: calls, heartbeats, and what is known of a rank that stopped."""
