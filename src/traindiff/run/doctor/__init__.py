"""The self-test: is a training the same with and without a recording, here, on this machine?"""
