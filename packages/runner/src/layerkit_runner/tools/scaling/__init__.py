"""`runner scaling`: a ladder of small runs, a fit of their losses, and a graded prediction."""
