"""Measures our operations beside the libraries that they use and beside other overlap libraries."""
