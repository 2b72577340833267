"""Triton kernels of Beam's elementwise arithmetic: the functions of `numerics`, forward and backward, in few passes.

They compute in float32 and round where `numerics` rounds. What is between two roundings is one kernel, so memory is
read and written once where the plain definitions pass over it several times. Any number of rows, and any width that
fits a block of 16,384.
"""
