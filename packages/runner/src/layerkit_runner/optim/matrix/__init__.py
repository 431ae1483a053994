"""Optimizers of the matrices of weights: Muon, SOAP, Shampoo and PSGD."""
