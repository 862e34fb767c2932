"""Kernels of Hopper, in Gluon: warp-specialised, by TMA and wgmma."""
