"""Networks that others have published: their weights into our networks, and SEAN's back out again.

encoder, generator = load_generator(state_dict)         state_dict = export_generator(encoder, generator)
discriminator = load_discriminator(state_dict)          state_dict = export_discriminator(discriminator)
vgg = load_vgg19("torchvision")
"""

from nets.published.sean import export_discriminator, export_generator, load_discriminator, load_generator
from nets.vgg import load_vgg19

__all__ = ["export_discriminator", "export_generator", "load_discriminator", "load_generator", "load_vgg19"]
