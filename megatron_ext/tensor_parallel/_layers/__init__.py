"""The layers behind `layers.py`: column- and row-parallel linear, vocab-parallel embedding, their checkpoints."""
