"""Fingerprints: does a state have the same bits as the state of another run?"""
