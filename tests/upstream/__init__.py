"""The tests of the libraries that the packages serve, run without a package and with it in force, and compared test by test."""
