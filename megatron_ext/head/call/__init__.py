"""The parts that every pass of a call uses: the resolved head, statistics, the gradient's form, sizes of chunks."""
