"""`make mutants`: mistakes that somebody could make in the source, and the tests that must find each of them."""
