"""What training costs, in bytes held and bytes moved: the one model that `auto` and `gan.plan` go by."""
