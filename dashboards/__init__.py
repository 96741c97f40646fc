"""The Dash app: explores stored runs through the findings and charts of probes. It imports no torch.

The URL is the state: a page is a function of the run and the URL, so a copied link shows the same view.
"""

from headscope.compat.dash import import_components_when_used

import_components_when_used()
