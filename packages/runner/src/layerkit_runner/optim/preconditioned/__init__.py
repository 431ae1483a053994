"""Optimizers that precondition the matrices of a model: SOAP, Shampoo and PSGD."""
