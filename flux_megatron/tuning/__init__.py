"""Which plan a problem gets: measuring plans, keeping them, choosing where none was measured."""
