"""Training code shared by the probes `adapt` and `pretrain`: batches, optimiser steps, validation loss, variants."""
