"""From a cluster profile to a plan. Pure: nothing here measures, reads files or talks to other ranks."""
