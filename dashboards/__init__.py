"""The Dash app: explores stored runs. Shows what probes say and draw; computes nothing, imports no torch.

The URL is the state: a page is a function of the run and of what the URL says, so a copied link shows the same view.
"""
