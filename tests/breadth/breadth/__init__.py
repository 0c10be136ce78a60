"""What tests/breadth/run is made of: trees, packages' own tests, and the table."""
