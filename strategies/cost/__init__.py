"""What training costs, in bytes held and bytes moved: `gan.plan` plays the phases without values and counts."""
