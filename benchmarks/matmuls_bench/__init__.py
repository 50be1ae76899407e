"""Measures the operations of matmuls and their alternatives: what `matmuls bench`, `bench-bert` and `spmm` call.

`table` has a row for each operation: its samples, its reference and the sizes to time. The tests are made from it too.
"""
