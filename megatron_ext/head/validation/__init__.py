"""What the head refuses, and how it says so."""
