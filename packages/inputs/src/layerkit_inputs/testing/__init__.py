"""Laws that every input obeys, for the tests of anyone who writes one."""
