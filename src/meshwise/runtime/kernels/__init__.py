"""Attention on one device, forward and backward, each in one pass over blocks of scores that are never whole.

`blocks` is plain JAX and runs everywhere; `tpu` and `gpu` are fused kernels. All three take and give the same, so that
rings and gradients are made of any of them (`meshwise.runtime.attention`).
"""
