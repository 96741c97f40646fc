"""Parts that the probes `adapt` and `pretrain` share: batches, optimiser steps, validation loss, AdaRoPE variants."""
