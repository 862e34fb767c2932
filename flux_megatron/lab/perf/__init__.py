"""What hardware can do, and what an operation ought to cost on it. No torch: plans are made
anywhere.
"""
