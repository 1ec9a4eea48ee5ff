"""IRON designs for the XDNA2 array, installed as ``tilefuse.designs``."""
